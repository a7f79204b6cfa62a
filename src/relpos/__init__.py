"""Self-attention with relative position representations (Shaw, Uszkoreit and Vaswani, 2018)."""
