"""The benchmark: this engine and what people use instead, on the same prompts, in turns.

`contestants` are ways to decode a prompt, `race` times them, `result` is what is known afterwards
(ratios, equal outputs, the best of each), `limits` is how far the hardware would let one go, and
`spec_bench` reads and writes the files of Spec-Bench.
"""
