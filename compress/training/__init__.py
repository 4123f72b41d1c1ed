"""Training: a compressed or smaller student learns from its teacher, on the grid that it is stored on."""
