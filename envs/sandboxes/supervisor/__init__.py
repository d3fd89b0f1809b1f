"""The program inside: PID 1 of a host, and the init process of every cell in it.

It runs where Palaestra is not installed, from one file (``bundle`` packs this package), with nothing but the standard
library of any python3 >= 3.8. So its modules import one another and the standard library, and no more.

One connection to its socket is one cell. The connection's first frame says which limits; then come requests, one reply
each; when the connection closes, for whatever reason, the cell ends with every process in it.
"""
