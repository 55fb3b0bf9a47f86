// What the page asks, answered by the model in the file instead of a server.
"use strict";

window.smallmindClient = (() => {
  const text = (id) => document.getElementById(id).textContent;
  const program = new smallmindModel.Program(
    JSON.parse(text("smallmind-about")),
    text("smallmind-weights"),
  );
  return { program };
})();
