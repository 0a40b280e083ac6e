"""The embedded world: captioned scenes, a verifier that reads them, and the training of the tiny models.

scenes (content of an image) -> render (its pixels) -> captions (scenes to text and back) -> verifier (is the
caption true of the pixels?) -> vae, contrast, flow, preference (the models) -> pretrain (one command).
"""
