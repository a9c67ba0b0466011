"""Other trainers on the same work, as rows of a comparison: `slm compare --ours_against trainer litgpt`."""
