"""Gates of the tree, one file each; a file's name is its gate's name."""
