"""The files of tables: which ones, what they hold row by row, and how predictions are written."""
