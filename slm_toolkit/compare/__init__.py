"""Many `accelerate launch`es, in turn, side by side or as Slurm jobs, each ending as a record."""
