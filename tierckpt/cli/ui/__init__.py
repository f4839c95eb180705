"""Application, output, plots and shared options of the command line."""
