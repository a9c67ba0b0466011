"""Records to rows, ranks and errors of predictions."""
