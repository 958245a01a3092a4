"""Training data: chat rows, loss masks, batches, answers by the target."""
