"""Upload models and datasets to the Hugging Face Hub, each with its card.

`hub` uploads a directory. `model_card` describes a model, from its run.
`dataset_card` describes a dataset, from its dataset.json.
"""
