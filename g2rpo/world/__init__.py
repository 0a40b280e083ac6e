"""The embedded world: captioned scenes, a verifier that reads them, and the training of the tiny models.

scenes (what is in a picture) -> render (its pixels) -> captions (its words, and back) -> verifier (is the
caption true of the pixels?) -> vae, contrast, flow, preference (the models) -> pretrain (one command).
"""
