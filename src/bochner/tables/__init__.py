"""Tables as they are: files are read, columns are understood, and predictions are written.

The modules in the order of a fit:

- ``errors``: the error that all of them raise, and how names and cells are shown in messages;
- ``cells``, ``dates``: what single cells say: numbers with units, truths, words for 'missing'; dates and times;
- ``files``: which files a table has (``paths``); CSV and its kin (``text``), Parquet and Excel (``binary``), and any of them
  as text, some rows at a time, with rows that cannot be used (``reading``); predictions, and rows that were left out (``writing``);
- ``columns``: what a column is, as plain data, and how its cells are read;
- ``understanding``: how it is found out what a column is;
- ``targets``: the same for the target, and the rule for labels;
- ``table``: all columns of a table together, and what has changed in a new one;
- ``estimators``: TableRegressor and TableClassifier;
- ``fitting``: reads, splits, fits and predicts for the command line.
"""
