"""The distribution `family-tuner-runtime`: what runs compiled models, without the tuner; see README.md.

Its package `family_tuner_runtime` imports nothing of this project, so that it can be installed alone; the tuner imports
it from here.
"""
