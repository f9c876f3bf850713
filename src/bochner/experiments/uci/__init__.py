"""The paper's UCI tables."""
