"""Language models as local Hugging Face folders: `models.py` is the way in. Needs the extra `[hf]`."""
