// Load one pixel of an image of up to four channels: step.py fills in the names in capitals.

FRAGMENT(load_pixel) {
  pixel = load_pack<TYPE, 4>(IMAGE + (AT));
}

// Load a pixel of three contiguous numbers by two words.
FRAGMENT(load_words) {
  const u32 first = AT;
  const u32* words = reinterpret_cast<const u32*>(IMAGE) + first / 2u;
  pixel = pixel_of_words<TYPE>(words[0], words[1], first % 2u);
}

FRAGMENT(load_channels) {
  #pragma unroll
  for (u32 c1 = 0; c1 < CHANNELSu; ++c1)
  PROLOGUE
}

// The same in two parts. What is loaded is used later, and stays in `raw` until then.
FRAGMENT(request_pixel) {
  const Pack<u32, 2> words = load_pack<u32, 2>(reinterpret_cast<const u32*>(IMAGE + (AT)));
  raw[0] = words.v[0], raw[1] = words.v[1];
}

FRAGMENT(deliver_pixel) {
  const Pack<u32, 2> words = {{raw[0], raw[1]}};
  pixel = *reinterpret_cast<const Pack<TYPE, 4>*>(&words);
}

FRAGMENT(request_words) {
  const u32* words = reinterpret_cast<const u32*>(IMAGE) + (AT) / 2u;
  raw[0] = words[0], raw[1] = words[1];
}

FRAGMENT(deliver_words) {
  pixel = pixel_of_words<TYPE>(raw[0], raw[1], (AT) % 2u);
}

FRAGMENT(request_channels) {
  #pragma unroll
  for (u32 c1 = 0; c1 < CHANNELSu; ++c1) raw[c1] = IMAGE[AT];
}
