"""The page's style sheet: light and dark, desktop and phone, nothing fetched."""

CSS = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1d2127; --soft: #5d6672;
  --line: #d9dee4; --card: #f6f7f9; --mark: #233dae; --shade: #0000004d; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e4e8ec; --soft: #9ea8b3;
  --line: #353b43; --card: #1c2026; --mark: #35d0ff; --shade: #ffffff4d; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 44px 0 6px; }
h3 { font-size: 1rem; margin: 0 0 2px; }
details .scroll { border-width: 1px 0 0; border-radius: 0; margin: 0; }
p { margin: 4px 0 12px; max-width: 75ch; }
.soft, .note { color: var(--soft); }
.note { font-size: 0.875rem; }
.scroll { overflow-x: auto; margin: 10px 0; border: 1px solid var(--line); border-radius: 8px;
  background: linear-gradient(to left, var(--page) 40%, transparent) right / 56px 100% local,
    linear-gradient(to left, var(--shade), transparent) right / 22px 100% scroll;
  background-repeat: no-repeat; } /* a shade at the edge behind which there is more */
.hint { display: none; }
table { border-collapse: separate; border-spacing: 0; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: 8px 14px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { font-size: 0.8125rem; font-weight: 600; color: var(--soft); background: var(--card);
  vertical-align: bottom; }
thead th[colspan] { text-align: center; border-bottom: 0; padding-bottom: 0; }
tr:first-child > th:first-child, tbody th, .text { text-align: left; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--page);
  white-space: normal; overflow-wrap: break-word; min-width: 9rem; max-width: 24rem; }
td small { display: block; color: var(--soft); font-size: 0.75rem; line-height: 1.3; }
.best { font-weight: 700; color: var(--mark); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 20px; margin: 14px 0; }
figure { margin: 0; padding: 14px 14px 8px; border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; display: flex; flex-direction: column; }
figure p { font-size: 0.875rem; color: var(--soft); margin: 0 0 8px; }
figure .files { margin: 4px 0 0; font-size: 0.75rem; }
svg { display: block; width: 100%; height: auto; margin-top: auto; font-family: inherit; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
a { color: var(--mark); }
details { border: 1px solid var(--line); border-radius: 8px; margin: 8px 0; }
summary { cursor: pointer; padding: 10px 14px; overflow-wrap: anywhere; }
pre { margin: 0; padding: 10px 14px; overflow-x: auto; font-size: 0.8125rem; line-height: 1.45;
  border-top: 1px solid var(--line); background: var(--card); }
@media (max-width: 600px) { main { padding: 18px 14px 40px; } table { font-size: 0.875rem; }
  th, td { padding: 6px 9px; }
  .hint { display: block; text-align: right; margin: 8px 0 -6px; font-size: 0.8125rem;
    color: var(--soft); }
  tbody th { min-width: 7rem; max-width: 9.5rem; }
  figure { padding: 12px 8px 6px; } h1 { font-size: 1.4rem; } }
@media print { details > * { display: block; } }
"""
