"""Models of images: the vision transformer, the classifier (ResNet) and the detector (YOLOv5)."""
