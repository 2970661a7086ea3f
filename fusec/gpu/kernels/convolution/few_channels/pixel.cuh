// Load one pixel of an image of up to four channels: step.py fills in the names in capitals.

FRAGMENT(load_pixel) {
  pixel = load_pack<TYPE, 4>(IMAGE + (AT));
}

// Load a pixel of three contiguous numbers by two words.
FRAGMENT(load_words) {
  const u32 first = AT;
  Pack<u32, 2> both;
  const u32* words = reinterpret_cast<const u32*>(IMAGE) + first / 2u;
  const u32 low = words[0], high = words[1];
  both.v[0] = first % 2u ? low >> 16 | high << 16 : low;
  both.v[1] = first % 2u ? high >> 16 : high & 0xffffu;
  pixel = *reinterpret_cast<const Pack<TYPE, 4>*>(&both);
}

FRAGMENT(load_channels) {
  #pragma unroll
  for (u32 c1 = 0; c1 < CHANNELSu; ++c1)
  PROLOGUE
}
