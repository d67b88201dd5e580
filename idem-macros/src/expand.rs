//! The model to tokens. Cannot fail and decides nothing: everything that acts is library code.
//!
//! `tests/expand/basic.rs` shows the whole of it. Tokens of the user's keep their spans, and a generated call is spanned to
//! the token of the user's that its type depends on, so that the compiler's errors point there.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Attribute, Ident, Path, ReturnType, Type};

use crate::model::{Field, HandlerFn, OnConflict, Parameter, Role, Settings, Source};
use crate::parse::Text;
use crate::paths::{alias, generated, generated_at, import};

/// The handler value that stands in the function's place.
pub(crate) fn expand(handler: &HandlerFn, settings: &Settings) -> TokenStream {
    let cfgs = attributes(handler, &["cfg"]);
    let quiet = quiet_if_deprecated(handler);
    let value = value(handler);
    let body = body(handler);
    let import = import(&settings.krate);
    let implementation = implementation(handler, settings);
    let warnings =
        settings.key.iter().filter_map(Source::minted).map(|(name, written)| minted(handler, &name, written));
    quote! {
        #value
        #body
        #(#warnings)*
        #(#cfgs)*
        #quiet
        const _: () = { #import #implementation };
    }
}

/// The unit struct of the function's name.
fn value(handler: &HandlerFn) -> TokenStream {
    let attrs = attributes(handler, &["doc", "cfg", "allow", "deprecated"]);
    let (vis, name) = (&handler.function.vis, &handler.function.sig.ident);
    quote! {
        #(#attrs)*
        #[derive(::core::clone::Clone, ::core::marker::Copy)]
        #[allow(non_camel_case_types, reason = "named as its function")]
        #vis struct #name;
    }
}

/// The user's function, token for token, inside an associated function of the same signature. In there its name means the
/// function, so that it can call itself.
fn body(handler: &HandlerFn) -> TokenStream {
    let attrs = attributes(handler, MOVED);
    let quiet = quiet_if_deprecated(handler);
    let function = &handler.function;
    let own_attrs = function.attrs.iter().filter(|attr| !is_one_of(attr, MOVED));
    let (vis, sig, block) = (&function.vis, &function.sig, &function.body);
    let (name, output) = (&sig.ident, &sig.output);
    let names: Vec<_> = handler.parameters.iter().map(|parameter| &parameter.name).collect();
    let types = handler.parameters.iter().map(|parameter| &parameter.ty);
    quote! {
        #(#attrs)*
        #quiet
        impl #name {
            /// The function itself, without its guard.
            #vis async fn body(#(#names: #types),*) #output {
                #(#own_attrs)*
                #sig #block
                #name(#(#names),*).await
            }
        }
    }
}

/// Warns of a part of the key that is made when the message comes (K2), at the literal that names it. A macro cannot warn
/// by itself, but the compiler warns where something deprecated is used.
fn minted(handler: &HandlerFn, name: &str, written: &Text) -> TokenStream {
    let attrs = attributes(handler, &["cfg", "allow", "warn", "deny", "forbid"]);
    let quiet = quiet_if_deprecated(handler);
    let constant = Ident::new(name, written.span);
    let note = format!(
        "`{}` is made when a message comes, so each copy of it has another key and takes effect again; name what all \
         copies share, or put `#[allow(deprecated)]` on the function",
        written.text
    );
    quote! {
        #(#attrs)*
        #quiet
        const _: () = {
            #[allow(non_upper_case_globals, reason = "named as what it warns of")]
            #[deprecated(note = #note)]
            const #constant: () = ();
            #constant
        };
    }
}

/// Attributes that go to the generated items instead of the function inside: there they would hide it, or be about
/// something else.
const MOVED: &[&str] = &["cfg", "allow", "expect", "warn", "deny", "forbid", "deprecated"];

/// A handler that is deprecated for others is not so for itself. This hides nothing of the user's: the compiler does not
/// look for deprecated items inside a deprecated one.
fn quiet_if_deprecated(handler: &HandlerFn) -> Option<TokenStream> {
    let deprecated = attributes(handler, &["deprecated"]);
    deprecated.first().map(|_| quote!(#[allow(deprecated, reason = "it is the deprecated handler itself")]))
}

fn attributes<'a>(handler: &'a HandlerFn, names: &[&str]) -> Vec<&'a Attribute> {
    handler.function.attrs.iter().filter(|attr| is_one_of(attr, names)).collect()
}

fn is_one_of(attr: &Attribute, names: &[&str]) -> bool {
    names.iter().any(|name| attr.path().is_ident(name))
}

fn implementation(handler: &HandlerFn, settings: &Settings) -> TokenStream {
    let (name, event, idem) = (&handler.function.sig.ident, &handler.event, alias());
    let spec = spec(handler, settings);
    let key = key(&settings.key);
    let fingerprint = fingerprint(&settings.fingerprint);
    let lock = lock(&settings.lock);
    let require = require(handler);
    let probe = settings.probe.as_ref().map(|probe| self::probe(handler, &probe.function));
    let call = call(handler);
    quote! {
        impl #idem::Handler for #name {
            type Event = #event;
            #spec
            #key
            #fingerprint
            #lock
            #require
            #probe
            #call
        }
    }
}

/// The attribute, as data.
fn spec(handler: &HandlerFn, settings: &Settings) -> TokenStream {
    let idem = alias();
    let name = handler.function.sig.ident.unraw().to_string();
    let consumer = &settings.consumer;
    let mode = if handler.is_atomic() { quote!(Atomic) } else { quote!(Lease) };
    let new = quote!(#idem::Spec::new(#name, #consumer, #idem::Mode::#mode));
    let set: Vec<TokenStream> =
        handler.batch.then(|| quote!(batch: true)).into_iter().chain(options(settings)).collect();
    if set.is_empty() {
        return quote!(const SPEC: #idem::Spec = #new;);
    }
    quote!(const SPEC: #idem::Spec = #idem::Spec { #(#set,)* ..#new };)
}

/// The arguments beside the two required ones, as fields of the spec.
fn options(settings: &Settings) -> impl Iterator<Item = TokenStream> {
    let idem = alias();
    let some = |name: &str, value: TokenStream| {
        let name = Ident::new(name, Span::call_site());
        quote!(#name: #idem::Option::Some(#value))
    };
    let lease = settings.lease.map(|lease| some("lease", duration(lease)));
    let max_run = settings.max_run.map(|max_run| some("max_run", duration(max_run)));
    let attempts = settings.attempts.map(|attempts| some("attempts", quote!(#attempts)));
    let backoff = settings.backoff.map(|(base, cap)| {
        let (base, cap) = (duration(base), duration(cap));
        some("backoff", quote!((#base, #cap)))
    });
    let constraints = &settings.domain_unique;
    let domain_unique = (!constraints.is_empty()).then(|| quote!(domain_unique: &[#(#constraints),*]));
    let on_conflict = settings.on_conflict.map(|choice| {
        let choice = match choice {
            OnConflict::DeadLetter => quote!(DeadLetter),
            OnConflict::Skip => quote!(Skip),
            OnConflict::Stop => quote!(Stop),
        };
        quote!(on_conflict: #idem::OnConflict::#choice)
    });
    let lock = (!settings.lock.is_empty()).then(|| quote!(lock: true));
    let probe = settings.probe.as_ref().map(|_| quote!(probe: true));
    [lease, max_run, attempts, backoff, domain_unique, on_conflict, lock, probe].into_iter().flatten()
}

fn duration(duration: Duration) -> TokenStream {
    let idem = alias();
    // Cannot be longer: durations were read from milliseconds that fit.
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    quote!(#idem::Duration::from_millis(#millis))
}

fn key(sources: &[Source]) -> TokenStream {
    let (idem, headers) = (alias(), generated("headers"));
    let event = event_name(first_field(sources));
    let parts = sources.iter().map(|source| match source {
        Source::Field(field) => {
            let (name, place) = (&field.path.text, place(field, &event));
            quote_spanned!(field.path.span=> .field(#name, #place)?)
        }
        Source::Header(header) => {
            let name = &header.text;
            quote_spanned!(header.span=> .header(#name)?)
        }
    });
    quote! {
        fn key(#event: &Self::Event, #headers: &dyn #idem::Headers) -> #idem::KeyResult {
            #idem::key(#headers) #(#parts)* .finish()
        }
    }
}

/// Nothing if there is no lock: the trait's own answer is right then.
fn lock(sources: &[Source]) -> Option<TokenStream> {
    if sources.is_empty() {
        return None;
    }
    let (idem, headers) = (alias(), generated("headers"));
    let event = event_name(first_field(sources));
    let parts = sources.iter().map(|source| match source {
        Source::Field(field) => {
            let (name, place) = (plain_path(field), place(field, &event));
            quote_spanned!(field.path.span=> .field(#name, #place))
        }
        Source::Header(header) => {
            let name = &header.text;
            quote_spanned!(header.span=> .header(#name))
        }
    });
    Some(quote! {
        fn lock(#event: &Self::Event, #headers: &dyn #idem::Headers) -> #idem::LockResult {
            #idem::lock(#headers) #(#parts)* .finish()
        }
    })
}

/// A lock is named by its path, which is the same one with and without `r#`.
fn plain_path(field: &Field) -> String {
    let segments: Vec<_> = field.path.text.split('.').map(|segment| segment.trim_start_matches("r#")).collect();
    segments.join(".")
}

fn first_field(sources: &[Source]) -> Option<&Field> {
    sources.iter().find_map(|source| match source {
        Source::Field(field) => Some(field),
        Source::Header(_) => None,
    })
}

/// Nothing if no fields are chosen: the trait's own answer is right then.
fn fingerprint(fields: &[Field]) -> Option<TokenStream> {
    let idem = alias();
    let event = event_name(Some(fields.first()?));
    let parts = fields.iter().map(|field| {
        let (name, place) = (&field.path.text, place(field, &event));
        quote_spanned!(field.path.span=> .field(#name, #place))
    });
    Some(quote! {
        fn fingerprint(#event: &Self::Event) -> #idem::FingerprintResult {
            #idem::fingerprint() #(#parts)* .finish()
        }
    })
}

/// The event's name in a function that reads these fields. It is resolved where the first of them was written: then the
/// compiler underlines the literal when a field is wrong, not the whole attribute, and the name is found although a
/// `macro_rules` gave the literal another context than the attribute.
fn event_name(first: Option<&Field>) -> Ident {
    generated_at("event", first.map_or_else(Span::call_site, |field| field.path.span))
}

/// `&__event.order.id`
fn place(field: &Field, event: &Ident) -> TokenStream {
    let (span, members) = (field.path.span, &field.members);
    let event = generated_at("event", span.resolved_at(event.span()));
    quote_spanned!(span=> &#event #(.#members)*)
}

/// Names what the function takes besides its event. The traits' functions are named, rather than bounds relied on, so that
/// the compiler reports a type that does not fit once, although [`call`] names it too.
fn require(handler: &HandlerFn) -> Option<TokenStream> {
    let (idem, needs) = (alias(), generated("needs"));
    let needed = handler.parameters.iter().filter_map(|parameter| match &parameter.role {
        Role::Transaction(ty) => {
            let engine = of_trait(ty, "Transactional", "ENGINE");
            Some(quote!(#needs.transaction(#engine);))
        }
        Role::Shared => {
            let check = of_trait(&parameter.ty, "Parameter", "check");
            Some(quote!(#needs.parameter(#check);))
        }
        Role::Event | Role::Events | Role::Job(_) | Role::Jobs(_) => None,
    });
    let needed: TokenStream = needed.collect();
    (!needed.is_empty()).then(|| quote!(fn require(#needs: &mut #idem::Requirements<'_>) { #needed }))
}

fn call(handler: &HandlerFn) -> TokenStream {
    let (idem, call) = (alias(), generated("call"));
    let arguments = handler.parameters.iter().map(|parameter| argument(parameter, Span::call_site()));
    let sig = &handler.function.sig;
    // Where the compiler reports a future that is not `Send`, and an answer that is no `Result`.
    let result = quote_spanned!(sig.ident.span()=> __idem::CallResult);
    let returned = match &sig.output {
        ReturnType::Type(_, ty) => ty.span(),
        ReturnType::Default => sig.ident.span(),
    };
    let answer = generated_at("answer", returned);
    let outcome = quote_spanned!(returned=> __idem::IntoOutcome::into_outcome(#answer));
    quote! {
        async fn call(#call: #idem::Call<'_, Self::Event>) -> #result {
            let mut #call = #idem::arguments(#call);
            let #answer = Self::body(#(#arguments),*).await;
            #outcome
        }
    }
}

/// The probe gets what the function gets, but the event by reference. Everything is spanned to the path that the attribute
/// gives, so that the compiler points there when the probe takes or answers something else.
fn probe(handler: &HandlerFn, function: &Path) -> TokenStream {
    let idem = alias();
    let span = function.span();
    let [call, event, answer] = ["call", "event", "answer"].map(|name| generated_at(name, span));
    let result = quote_spanned!(span=> __idem::ProbeResult);
    let arguments = handler.parameters.iter().map(|parameter| match parameter.role {
        Role::Event => quote_spanned!(span=> &#event),
        _ => argument(parameter, span),
    });
    let asked = quote_spanned!(span=> #function(#(#arguments),*).await);
    let outcome = quote_spanned!(span=> __idem::IntoProbe::into_probe(#answer));
    quote! {
        async fn probe(#call: #idem::Call<'_, Self::Event>) -> #result {
            let mut #call = #idem::arguments(#call);
            let #event = #call.event()?;
            let #answer = #asked;
            #outcome
        }
    }
}

/// One argument of the function, taken from the call, whose name is made at `span`. Errors about it are shown there.
fn argument(parameter: &Parameter, span: Span) -> TokenStream {
    let call = generated_at("call", span);
    let (taker, function) = match &parameter.role {
        Role::Event => return quote_spanned!(span=> #call.event()?),
        Role::Events => return quote_spanned!(span=> #call.events()),
        Role::Jobs(ty) => {
            let all = of_trait(ty, "JobParameter", "all");
            return quote_spanned!(span=> #call.jobs(#all));
        }
        Role::Job(ty) => ("job", of_trait(ty, "JobParameter", "one")),
        Role::Transaction(ty) => ("transaction", of_trait(ty, "Transactional", "of")),
        Role::Shared => ("parameter", of_trait(&parameter.ty, "Parameter", "take")),
    };
    let taker = Ident::new(taker, Span::call_site());
    quote_spanned!(span=> #call.#taker(#function)?)
}

/// `<Ty as __idem::Trait>::function`
fn of_trait(ty: &Type, name: &str, function: &str) -> TokenStream {
    let idem = alias();
    let (name, function) = (Ident::new(name, Span::call_site()), Ident::new(function, Span::call_site()));
    quote!(<#ty as #idem::#name>::#function)
}
