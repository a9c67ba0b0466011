"""RunConfig: the flags that must be equal for a fair comparison, and the command line made of them."""
