"""What a row gives beside its plain sample: captions, flips and crops of which each draw
takes one, and sizes of which each is a sample of its own.
"""
