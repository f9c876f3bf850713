"""One module per table or figure of the paper: a frozen configuration in, rows on disk out."""
