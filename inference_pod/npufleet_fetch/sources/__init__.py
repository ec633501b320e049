"""One module per kind of source, behind one protocol."""
