"""Linear layers, with what comes directly before and after the product (DeepSpeed Inference, section III-B)."""
