"""One file per operator; the file's name is the operator's name."""
