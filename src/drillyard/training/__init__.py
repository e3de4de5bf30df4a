"""The training engine: the loss, the optimizer, the schedule, the step, and the loop around it."""
