"""What a token row looks like on the dispatch wire, how it is quantized, and what cannot fit."""
