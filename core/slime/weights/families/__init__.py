"""Model families: for each, what its `config.json` means to Megatron and the names of its tensors.

A family is one file with one `Family` object.  To add one: write the file, register it in
`slime.weights.families.table`.
"""
