"""`ngrpo new`: a file of one's own and its test, to start from."""
