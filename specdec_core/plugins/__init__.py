"""This library's drafters inside other programs, which decode and verify by themselves."""
