"use strict";
// plotly, from the compressed copy in this file; false where the browser is too old to unpack it
async function unpackPlotly() {
  if (typeof DecompressionStream === "undefined") return false;
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const code = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const element = document.createElement("script");
  element.textContent = code;
  document.head.append(element);
  return true;
}
