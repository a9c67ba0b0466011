"""The parts of a training step's memory, by use."""

PARTS = {
    "parameters": "parameters",
    "master_weights": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "gathered_parameters": "gathered parameters",
    "communication": "communication buckets",
    "temporary": "temporary",
}
"""The title of each part. The first four are the training state; activations are saved for backward;
temporary is allocated and freed again by a layer's backward or the optimizer's step; communication is
buckets."""
