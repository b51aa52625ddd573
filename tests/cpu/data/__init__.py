"""Reading, rendering, packing, prompts and manifests."""
