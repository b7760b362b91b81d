"""One file per perturbation; the file's name is the perturbation's name."""
