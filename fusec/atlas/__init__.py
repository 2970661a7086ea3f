"""The atlas: a table of fusion patterns, GPUs and releases of cuDNN, asked without a GPU.

`patterns` lists what is asked, `collect` asks releases, `document` holds the answers as JSON, and `page` shows them.
"""
