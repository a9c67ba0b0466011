"""Many `accelerate launch`es, one after the other, each ending as a record."""
