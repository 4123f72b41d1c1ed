"""Checkpoints in other tools' layouts: GGUF, dense, GPTQ and AWQ. One file per layout, streamed tensor by tensor."""
