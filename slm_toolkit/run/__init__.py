"""What a training process needs: engine, data, loss, clocks, checkpoints. Imports torch."""
