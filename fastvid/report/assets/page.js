"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const one = (query, root = document) => root.querySelector(query);

{
  const dark = one("#dark"), system = dark.media;
  const choose = (theme) => { dark.media = theme === "dark" ? "screen" : theme === "light" ? "not all" : system; };
  try { choose(localStorage.getItem("fastvid-theme")); } catch { /* a page from a file may have no storage */ }
  one("#theme").addEventListener("click", () => {
    const theme = matchMedia(dark.media).matches ? "light" : "dark";
    choose(theme);
    try { localStorage.setItem("fastvid-theme", theme); } catch { /* as above */ }
  });

  const tip = one("#tip");
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.style.opacity = target ? 1 : 0;
    if (!target) return;
    tip.textContent = target.dataset.tip;
    const box = tip.getBoundingClientRect();
    const x = Math.min(Math.max(event.clientX - box.width / 2, 8), innerWidth - box.width - 8);
    const y = event.clientY - box.height - 14 < 8 ? event.clientY + 18 : event.clientY - box.height - 14;
    tip.style.transform = `translate(${x}px, ${y}px)`;
  });
}
