"""Token ids and text: detokenising, stop strings, grammars, n-gram look-up."""
