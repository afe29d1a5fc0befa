(() => {
  const search = one("#find-class");
  if (search) search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const item of all("[data-class]")) item.hidden = !item.dataset.class.toLowerCase().includes(wanted);
  });

  const dialog = one("#clip");
  const show = (tile) => {
    const stage = one(".stage", dialog), body = one(".body", dialog);
    const copy = tile.cloneNode(true);
    const height = 300, wide = Math.min(dialog.clientWidth || 880, innerWidth * 0.94);
    const width = +tile.style.getPropertyValue("--w"), scale = Math.min(height / 120, wide / width);
    copy.removeAttribute("tabindex");
    copy.style.setProperty("--w", width * scale);
    copy.style.setProperty("--h", 120 * scale + "px");
    for (const part of all(".cap, .len, dl", copy)) part.remove();
    stage.replaceChildren(copy);
    const title = document.createElement("h3");
    title.textContent = tile.dataset.key;
    const facts = one("dl", tile).cloneNode(true);
    body.replaceChildren(title, facts);
  };
  for (const tile of all(".tiles .tile")) {
    const open = () => { dialog.showModal(); show(tile); };
    tile.addEventListener("click", open);
    tile.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
  }
  if (dialog) {
    one(".close", dialog).addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }

  const ledger = one("#ledger");
  if (ledger) {
    const rows = all("tbody tr", ledger), words = one("#find-source"), found = one("#found"), empty = one("#none");
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const apply = () => {
      const wanted = words.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !texts[index].includes(wanted);
        shown += !row.hidden;
      });
      found.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
      empty.hidden = shown > 0;
    };
    words.addEventListener("input", apply);
    apply();
  }
})();
