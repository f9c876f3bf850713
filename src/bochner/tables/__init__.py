"""Tables as they are: files in, columns understood, model files and predictions out.

The files in the order of a fit: ``reading`` reads a file as text, ``cells`` says what single cells are, ``columns`` what a column
is, ``table`` puts columns and target together, ``estimators`` holds the two scikit-learn classes, ``fitting`` splits, fits and
predicts for the command line, ``writing`` writes predictions and rows that were left out. ``errors`` is what all of them raise.
"""
