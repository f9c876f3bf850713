"""Tables larger than memory: a fit goes through the rows twice, in pieces, on one machine or on several.

1. A random sample of the rows is drawn. Columns, hyperparameters, networks and anchors are learnt from it, as from a small table.
2. Every head's sums are taken over all rows. Some rows of the sample learn nothing in this pass: they judge the heads, choose their
   noise, amplitude and weights again, and are added last.
"""
