"""Between token ids and text: detokenising, stop strings, grammars."""
