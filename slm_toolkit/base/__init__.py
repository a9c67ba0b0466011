"""What every room uses: errors, files that users name, files that runs write, secrets."""
