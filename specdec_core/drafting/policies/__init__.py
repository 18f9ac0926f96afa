"""Length policies: after this candidate, draft another one or verify?"""
