"""EAGLE heads on disk, one module per format.

Each has `recognises(config, folder)`, whether a folder with that `config.json` is of the format;
`build(config, layers, name)`, the head of that shape for a target of `layers` layers, without its
weights; and `renamed(tensor)`, how the head calls a tensor of the file. Errors name `name`.
"""
