"""A weight matrix as compiled loops take it: addresses and sizes in a row of int64."""

NUMBERS, SCALES, MINIMA, OUT, IN, KIND, BIAS = range(7)  # places; an address of 0 is none
SIZE = 7
BLOCK = 32  # numbers of a block, which have one scale; as a kind, blocks of it
FINE = 33  # the kind of blocks with two scales; kinds below 3 are those of `numpy_views.KINDS`
