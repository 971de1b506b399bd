"""Embedding lookup and sparse update beside the dense computation; see async_emb.async_emb."""
