"""Code that every room uses: errors, users' files, runs' files, secrets."""
