"""The paper's experiments with images."""
