"""Upload models to the Hugging Face Hub, with a card.

`hub` uploads a directory, and has the flags for it.
`model_card` describes a model, from its run.
"""
